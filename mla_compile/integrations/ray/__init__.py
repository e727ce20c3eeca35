"""Engines on Ray: lists of prompts in Ray Data (`data.py`), replicas of a server on Ray Serve (`serve.py`).

Each file imports what it needs of Ray: `pip install '.[ray]'` in the clone.
"""
