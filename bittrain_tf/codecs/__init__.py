"""Codecs: how a saved activation is stored. One file each."""

from bittrain_tf.codecs.base import Codec, get_codec, register_codec
from bittrain_tf.codecs.bitmap import BitmapCodec
from bittrain_tf.codecs.dense import DenseCodec

__all__ = ["BitmapCodec", "Codec", "DenseCodec", "get_codec", "register_codec"]
