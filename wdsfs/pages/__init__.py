"""A set as pages in a browser: `wdsfs view`.

The local server, its pages and what they ask of a set. What makes hostile bytes safe to show is in previews, and
its charts, also for `info
--plot`, in `plots.py`. This room opens no set itself, and decides nothing about what a set shows or how
a change is kept: it is handed a tree, as a mount is. The commands are in `cli`.

What comes with the extra `view` is imported in this room only, and only when a command asks for it. Start with
`pages.py`: which address shows what.

Previews: what a page shows of one file, made safely from bytes that others have written.

`previewer.py` is what others use: it finds a preview in its cache, or has it made. `preview.py` says what a
preview is: plain data, never HTML. `kinds.py` decides by extension and first bytes which decoder a file gets;
texts, labels and hex (`plain.py`) are made at once, all else by worker processes (`pool.py` and `worker.py`, which
exchange the messages of `wire.py`; `member_file.py` reads). `decoders.py` names the decoders, one module each:
pictures, JSON, arrays, tables, media, packed content. Nothing here knows shards, trees or HTTP.
"""
