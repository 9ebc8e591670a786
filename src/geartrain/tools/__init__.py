"""Tools around the library: command line, doctor, planner, and emulated ranks, hosts and devices for tests."""
