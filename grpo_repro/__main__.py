"""`python -m grpo_repro` is `grpo-repro`."""

from grpo_repro.cli import main

if __name__ == "__main__":
    main()
