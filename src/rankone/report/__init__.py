"""What a run looks like: figures (plots.py) and the page that explains them (page.py).

Nothing is imported here, because targets draw with plots.py and page.py knows whole runs.
"""
