"""Shards that are elsewhere: in object stores, on web servers, on the Hugging Face hub.

A remote shard is an *object*: a URL (`urls.py`) and its *pin* (`pin.py`), by which every answer of a store is
checked to be of one and the same content. Other rooms ask `any_shard.py` and `shards.py`. These ask `client.py`,
which reads from the cache (`object_cache.py`, `cached_object.py`, `cache_room.py`) and asks the
fetcher for the rest.

`fetcher.py` is the one process that speaks to the network. `launch.py` starts it, `messages.py` has its messages.
`demand.py` decides which range is fetched when (with `parts.py` and `passes.py`), and `stores.py` asks the stores:
through `store_clients.py`, with the credentials of `settings.py` and the environment, by the rules of
`retries.py`.
`answers.py` reads the answers, `hub.py` knows the Hugging Face hub, `uploads.py` writes new objects.

What to mount and when to read is for the rooms above. Start with `urls.py`, then `shards.py`.
"""
