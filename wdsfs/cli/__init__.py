"""The commands: arguments in; tables, lines or JSON and an exit code out.

`main.py` is the group of all commands, with messages, exit codes and interrupts; a command is in the module
`NAME_command.py` (`commit_command.py`, `pack_command.py`, `table_command.py`), or with others of its subject in
`SUBJECT_commands.py` (`look_commands.py`, `live_commands.py`, `interop_commands.py`, `prepare_commands.py`,
`mount_commands.py`, `overlay_commands.py`, `help_commands.py`). They share options (`view_options.py`: which
shards, and what is shown; `opening_options.py`: index, caches, stores), the form of commands and options, and what
shells offer (`option_kinds.py`), `process.py` (signals, streams) and `output.py` (tables, progress bars).
`mount_helper.py` is `mount -t wdsfs`. Decided here are the words and options of the command line and the form of
the output; the work is done by the rooms below, which a command imports when it is called. Start with `main.py`.
"""
