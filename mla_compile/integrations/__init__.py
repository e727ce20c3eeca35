"""Integrations with other libraries, one folder each, imported only on request."""
