"""Sessions that compare operations with local torch (``verify=``)."""
