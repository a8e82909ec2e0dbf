"""The viewer: one page in which a decomposition can be clicked through, offline.

harvest.py sees every subcomponent at work on data; gather.py puts together what the page shows, from as
much as is at hand; write.py makes one file of it, with app.js and style.css inside. Nothing is imported
here.
"""
