"""One adapter a framework. Each says what of our Objective the framework can express, and calls the framework's own functions."""
