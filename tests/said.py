"""What a command said to a user who asked for something wrong."""


def one_line(capsys):
    """What stderr says, which is one line without a traceback, while stdout says nothing."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    return said.err
