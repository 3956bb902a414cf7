"""Previews: what a page shows of one file, made safely from bytes that others have written.

`previewer.py` is what others use: it finds a preview in its cache, or has it made. `preview.py` says what a
preview is: plain data, never HTML. `kinds.py` decides by extension and first bytes which decoder a file gets;
texts, labels and hex (`plain.py`) are made at once, all else by worker processes (`pool.py` and `worker.py`, which
exchange the messages of `wire.py`; `member_file.py` reads). `decoders.py` names the decoders, one module each:
pictures, JSON, arrays, tables, media, packed content. Nothing here knows shards, trees or HTTP. Start with
`previewer.py`.
"""
