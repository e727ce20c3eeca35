"""An OpenAI-compatible server: the engine in a process of its own, and HTTP in front of it."""
