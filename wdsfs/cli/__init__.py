"""The commands: arguments in; tables, lines or JSON and an exit code out.

`main.py` is the group of them, with messages and exit codes; each command is a module, `NAME_command.py`, but
`export_commands.py` and `overlay_commands.py` (`diff`, `commit`). `console.py` is what they share: options and
opening a set; `output.py` how results look. `doctor.py` checks the machine, `mount_helper.py` is `mount -t wdsfs`.
Each command imports what it works with when it is called, so that `wdsfs --help` answers at once. Start with
`main.py`.
"""
