"""The commands: arguments in; tables, lines or JSON and an exit code out.

`main.py` is the group of all commands, with messages, exit codes and interrupts. A command is in the module
`NAME_command.py` (`commit_command.py`, `pack_command.py`, `table_command.py`), or with others of its subject in
`SUBJECT_commands.py` (`look_commands.py`, `live_commands.py`, `interop_commands.py`, `prepare_commands.py`,
`mount_commands.py`, `overlay_commands.py`, `help_commands.py`). The commands share these modules:
`view_options.py` (options that choose shards, and options of the view), `opening_options.py` (options of index,
caches and stores), `option_kinds.py` (the form of commands and options, completion), `process.py` (signals,
streams) and `output.py` (tables, progress bars). `mount_helper.py` is `mount -t wdsfs`. This room decides
the words and options of the command line, and the form of the output. The rooms below do the work. Start with
`main.py`.
"""
