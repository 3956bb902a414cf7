"""The commands: arguments in; tables, lines or JSON and an exit code out.

`main.py` is the group of all commands, with messages, exit codes and interrupts; a command is in the module
`NAME_command.py`, or with others of its subject in `SUBJECT_commands.py` (look, live, index, cache, mount,
overlay, help). They share `options.py`, `process.py` (signals, streams) and `output.py` (tables, progress bars).
`mount_helper.py` is `mount -t wdsfs`, `completion.py` is what shells offer. Decided here are the words and options
of the command line and the form of the output; the work is done by the rooms below, which a command imports when
it is called. Start with `main.py`.
"""
