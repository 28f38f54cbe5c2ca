"""`grpo-repro`, or `python -m grpo_repro`. Loading torch takes seconds, and Ctrl-C in them is no fault to trace."""

import sys


def main() -> None:
    try:
        from grpo_repro.cli import main as command
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
