"""`python -m rankrl`: the console command, also where installed scripts are not on the path."""

from rankrl.cli.app import main

if __name__ == "__main__":
    main()
