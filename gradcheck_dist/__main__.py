"""`python -m gradcheck_dist` is the command `gradcheck`."""

from gradcheck_dist.cli.main import main

if __name__ == "__main__":
    main()
