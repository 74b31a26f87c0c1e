from __future__ import annotations


def is_megatron(folder):
    return False


def job(*a):
    raise NotImplementedError
