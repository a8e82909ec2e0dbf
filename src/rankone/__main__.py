"""`python -m rankone` and the `rankone` command."""

from rankone.cli import main

if __name__ == "__main__":
    main()
