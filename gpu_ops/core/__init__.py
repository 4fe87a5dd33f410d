"""A call as data: validation, dispatch, allocation and launch, once for all ops."""
