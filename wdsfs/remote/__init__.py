"""Shards that are elsewhere: in object stores, on web servers, on the Hugging Face hub, in the output of commands.

A remote shard is an *object*: a URL and its *pin* (`urls.py`), by which every answer of a store is checked to be
of the same content. Other rooms ask `shard_paths.py`, which answers for files, too. That asks `client.py`, which
reads from the cache (`object_cache.py`, `cached_object.py`) and asks the fetcher for the rest. `fetcher.py` is the
one process that speaks to the network; `launcher.py` starts it, `messages.py` has its messages. `open_objects.py`
reads, `demand.py` decides which range is fetched when (with `parts.py` and `passes.py`), and `stores.py` asks the
stores: through `store_clients.py`, with the credentials of `settings.py` and the environment, by the rules of
`retries.py`. `answers.py` reads the answers, `web_fallback.py` asks web servers that these cannot, `hub.py` knows
the Hugging Face hub, `spooled.py` keeps what comes only once. What to mount and when to read is decided in the
rooms above, which cached objects are evicted in `storage`. Start with `urls.py`.
"""
