"""Entry point of a process of an actor pool: `python -m geartrain.launch.actor_entry`."""

from geartrain.launch.actor_process import main

if __name__ == "__main__":
    main()
