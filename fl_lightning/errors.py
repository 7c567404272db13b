"""Errors that are the user's to mend; the command line prints them on one line and exits with code 2."""


class FLError(Exception):
    """A fault in what the user asked for. The message names key, value, rule and remedy."""


class ConfigError(FLError):
    """A configuration that cannot run, found before anything is written or trained."""


class DataError(FLError):
    """A data set that is absent, damaged or of the wrong form."""


class TrackingError(FLError):
    """A tracking store that cannot be used."""


class PrivacyError(FLError):
    """A privacy demand that cannot be met or a composition without a proof."""


class CheckpointError(FLError):
    """A run that cannot be resumed: no checkpoint, a damaged one, or one of another program version."""
