"""The one exception that a user's mistake raises.

Everything a user can get wrong (configuration, data, files, a reward of their own) ends in a `UserError`: the
command line prints it as one line, `error: section.key: what is wrong; what to do`, and exits with status 2 (wrong
usage or configuration) or 1 (the run failed). A traceback is for bugs of ours only. Imports nothing, so that any
module may use it.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2


class UserError(Exception):
    """A problem that the user can solve.

    Args:
        where: the setting, file or argument at fault, such as `algorithm.clip.lower`.
        problem: what is wrong and what to do about it, in one line.
        exit_code: 2 for wrong usage or configuration (before the run starts), 1 for a run that failed.
    """

    def __init__(self, where: str, problem: str, *, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem
        self.exit_code = exit_code
