"""`python -m lorafold` is `lorafold`."""

from lorafold.cli import main

if __name__ == "__main__":
    main()
