"""A set as pages in a browser: `wdsfs view`.

The local server, its pages, and previews of files that are safe to show although others have written the bytes.
This room decides nothing about what a set shows or how a change is stored: it gets a tree, as a mount does.

A request goes through `server.py` (the guard) to `site.py` (which address shows what), `grid.py` and
`downloads.py`; these read the set through a snapshot of `library.py`, with the filters of `search.py` and the
changes in `writable_mount.py`. Previews are plain data (`preview.py`), made and cached by `previewer.py`; what
needs a decoder is made by processes of their own (`worker.py`, confined by `sandbox.py`), over the messages of
`wire.py`.

What comes with the extra `view` is imported in this room only, and only when a command needs it. Start with
`site.py`.
"""
