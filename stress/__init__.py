"""Long runs that look for faults: random calls, modules, files, requests and traces, and faults of the machine.

Each module is a command, `python -m stress.NAME`; `docs/stress.md` describes them. `tests/stress` has short versions.
"""
