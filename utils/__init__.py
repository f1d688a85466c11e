"""The shared modules of the scripts, one concern a module."""
