"""This paper and nothing else: its experiments as YAML, its tables and its figures."""
