"""What the report of two dumps and the report of tokens have in common.

``words``: figures in the words of every form; ``terminal`` and ``markdown``: printing, and the blocks about tokens;
``page``: an HTML page from a template, data and scripts, of which the .html (macros) and .js files here are the common
ones.
"""
