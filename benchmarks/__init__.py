"""What the package costs, beside what a user would pick instead: `make bench` (results/reports/benchmark) and `make gpu`."""
