"""The integrations: code that makes the blocks of one framework follow a scheme.

Each framework has a folder. :mod:`~olmo_lns.integrations.any_model` is for models of no framework, and the other
integrations use its functions. Parts of an integration are elsewhere: its flags in :mod:`olmo_lns.frameworks`, its
models in :mod:`olmo_lns.dispatch`, its studies in ``study/engines`` and its exports in ``export``.
"""
