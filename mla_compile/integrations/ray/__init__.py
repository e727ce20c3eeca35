"""Engines on Ray: batch completion in Ray Data (`data.py`), replicas of the server on Ray Serve (`serve.py`).

Each file imports Ray: `pip install '.[ray]'` in the clone.
"""
