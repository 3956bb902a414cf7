def test_x(program):
    import tars
    (program.home/"a.tar").write_bytes(tars.tar(tars.A, tars.B))
    with program.mounted("a.tar") as m:
        print(list(m.path.rglob("*")), m.processes(), m.log())
        import os
        for p in m.processes(): print(p,[os.readlink(e.path) for e in os.scandir(f"/proc/{p}/fd")])
        (m.path/"a"/"a"/"txt").read_bytes()
        print(m.status())
def test_f(program):
    import tars
    (program.home/"a.tar").write_bytes(tars.tar(tars.A, tars.B))
    with program.mounted("a.tar", foreground=True) as m:
        print(list(m.path.rglob("*")), m.processes(), m.log())
def test_u(user_program):
    program=user_program
    import tars
    (program.home/"a.tar").write_bytes(tars.tar(tars.A, tars.B))
    with program.mounted("a.tar") as m:
        print(m.log())
        print(m.status())
