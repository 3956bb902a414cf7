"""A set as pages in a browser: `wdsfs view`.

The local server, its pages and what they ask of a set. What makes hostile bytes safe to show is in `previews`, and
what is drawn of a set in `plots`. This room opens no set itself, and decides nothing about what a set shows or how
a change is kept: it is handed a tree, as a mount is. The commands are in `cli`.

What comes with the extra `view` is imported in this room only, and only when a command asks for it. Start with
`pages.py`: which address shows what.
"""
