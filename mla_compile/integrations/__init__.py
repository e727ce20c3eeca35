"""mla-compile inside other libraries, one folder each; nothing here is imported before you ask for it."""
