"""The fast engine: a second implementation of step.py for CPUs. See README.md beside this file."""
