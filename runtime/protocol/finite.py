"""The setting of a Switch that is not torch's: whether nodes look at what they compute (``dt.seeing.check_finite``)."""

#: Its name, and its values but "", for a node that looks at nothing.
CHECK_FINITE = "check_finite"
NAN, INF = "nan", "inf"  #: whether NaN alone fails, or infinities, too
