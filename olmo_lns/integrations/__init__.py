"""The integrations: code that makes the blocks of one framework follow a scheme.

Each framework has a folder. Its ``register`` wraps functions of the framework. Its module ``integration`` says how the
public functions treat models that are built already, by :class:`olmo_lns.integrations.interface.Integration`.
:mod:`~olmo_lns.integrations.any_model` finds and scales the norms of such models. Parts of an integration are
elsewhere: its flags in :mod:`olmo_lns.frameworks`, its studies in ``study/engines`` and its exports in ``export``.
"""
