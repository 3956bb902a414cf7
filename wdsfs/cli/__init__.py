"""The commands: arguments in; tables, lines or JSON and an exit code out.

`main.py` is the group of them, with messages and exit codes; a command is in the module `NAME_command.py`, or with
others of its subject: `look_commands.py`, `help_commands.py`. All share `options.py`, `process.py` (signals), and
`output.py` (tables, bars). `diff`, `commit` and `restore` share `overlay_commands.py`; `commit` and `pack` share
`shard_report.py`. `mount_helper.py` is `mount -t wdsfs`, `completion.py` is what shells offer. A command is
imported when it is given, and imports what it works with when it is called. Start with `main.py`.
"""
