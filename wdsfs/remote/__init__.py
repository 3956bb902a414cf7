"""Shards that are elsewhere: in object stores, on web servers, on the Hugging Face hub, in the output of commands.

A remote shard is an *object*: a URL and its *pin* (room `door`), with which every answer of a store is compared,
so that all bytes are of the same content. The door asks `remote_shards.py`, which has the URLs with their secrets,
and the pins (`known_pins.py`). It uses `client.py`, which reads from the cache (`object_cache.py`,
`cached_object.py`) and asks the fetcher for the rest.
`fetcher.py` is the only process that speaks to the network; `launcher.py` starts it, `messages.py` has its
messages. `open_objects.py` reads, `demand.py` decides which range is fetched when (with `parts.py` and
`passes.py`), and `stores.py` sends requests to stores: through `store_clients.py`, with the credentials of
`settings.py` and the environment, by the rules of `retries.py`. `answers.py` reads the answers. `web_fallback.py`
asks web servers whose answers the library refuses, `etags.py` knows those whose ETags mislead, `listing_pages.py`
lists buckets with names that the library refuses. `hub.py` knows the Hugging Face hub, `multipart.py` sends large
objects in parts, `spooled.py` keeps objects that come only once. The rooms above decide what to mount and when to
read, and `storage` which cached objects are evicted. Start with `client.py`.
"""
