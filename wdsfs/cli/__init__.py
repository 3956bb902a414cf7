"""The commands: arguments in; tables, lines or JSON and an exit code out.

`main.py` has most commands, `overlay_commands.py` those that work on overlays (`diff`, `commit`),
`restore_command.py`, `export_commands.py` and `status_command.py` have `restore`, `export` and `status`;
`console.py` is what they share: options, progress, tables. `doctor.py` checks the machine, `mount_helper.py` is
`mount -t wdsfs`. Each command imports what it works with when it is called, so that `wdsfs --help` answers at
once. Start with `main.py`.
"""
