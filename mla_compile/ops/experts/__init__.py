"""Routed and shared experts, and the router before them."""
