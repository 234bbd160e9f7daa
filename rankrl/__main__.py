"""Run the console command as `python -m rankrl`, also where installed scripts are not on the path."""

from rankrl.cli.app import main

if __name__ == "__main__":
    main()
