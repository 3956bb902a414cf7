"""Shards that are elsewhere: in object stores, on web servers, on the Hugging Face hub, in the output of commands.

A remote shard is an *object*: a URL and its *pin* (room `door`), with which every answer of a store is compared,
so that all bytes are of the same content. The rooms above decide what to mount and when to read, and `cache`
which cached objects are evicted. Start with `client.py`.

- `remote_shards.py` answers the door: it has the URLs with their secrets, and the last pins.
- `client.py` reads from the cache and asks the fetcher for the rest, in frames of `messages.py`. It also starts
the fetcher. `settings.py` has the options of stores.
- The cache: `object_cache.py` opens objects, `cached_object.py` is one. `spooled.py` fills it with objects that
  come only once.
- `fetcher.py` is the only process that speaks to the network, and answers the kernel.
  `open_objects.py` reads, `demand.py` decides which range is fetched when. `passes.py` chooses ranges to fetch
  ahead, `parts.py` has the requests in flight, and `held_bytes.py` the latest bytes of objects in no cache.
- `store_reader.py` reads objects of stores, `listings.py` lists buckets, `store_sender.py` writes objects.
  `store_requests.py` repeats their requests, by the rules of `retries.py`, through the clients of
  `store_clients.py`. `answers.py` translates answers and errors, and knows web servers whose ETags mislead;
  `hub.py` knows the Hugging Face hub.
"""
