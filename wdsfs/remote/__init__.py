"""Shards that are elsewhere: in object stores, on web servers, on the Hugging Face hub, in the output of commands.

A remote shard is an *object*: a URL and its *pin* (room `door`), with which every answer of a store is compared,
so that all bytes are of the same content. The door asks `remote_shards.py`, which has the URLs with their secrets,
and the pins (`known_pins.py`). It uses `client.py`, which reads from the cache (`object_cache.py`,
`cached_object.py`) and asks the fetcher for the rest.
`fetcher.py` is the only process that speaks to the network; `launcher.py` starts it, `messages.py` has its
messages. `open_objects.py` reads, `demand.py` decides which range is fetched when (with `parts.py` and
`passes.py`). `store_reader.py` reads objects of stores, `listings.py` lists buckets, `store_sender.py` writes
objects: all by `store_requests.py`, which repeats requests by the rules of `retries.py`, through the clients of
`store_clients.py`, with the credentials of `settings.py` and the environment. `answers.py` translates the errors.
`urllib_client.py` asks where obstore refuses an answer, `etags.py` knows web servers whose ETags mislead. `hub.py`
knows the Hugging Face hub, `spooled.py` keeps objects that come only once. The rooms above decide what to mount
and when to read, and `storage` which cached objects are evicted. Start with `client.py`.
"""
