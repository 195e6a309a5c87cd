"""The one exception type for everything a user can cause and mend."""


class UserError(Exception):
    """A failure the user can mend; its text names the thing and the mend.

    `scripts.lib.cli.run` prints it as one line and exits with status 2, so no
    script needs a traceback for a bad path, a bad setting or a full disk.
    """
