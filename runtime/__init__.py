"""The engine beneath disttensor: commands, codec, transports, data channels, the worker and the launchers.

Its import name is ``disttensor.runtime``; it never imports the rest of disttensor.
"""

if __name__ != "disttensor.runtime":
    raise ImportError(
        "the engine's import name is 'disttensor.runtime', not 'runtime'; write 'from disttensor.runtime import ...'"
    )
