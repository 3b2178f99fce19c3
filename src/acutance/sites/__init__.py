"""Where attention lives in a model: one file per library, each with a `LIBRARY`.

A site makes an `AttentionCall` of what its model does. No formula of a metric or a mitigation stands here.
"""

import pkgutil
from importlib import import_module

from acutance.errors import NoSitesError as NoSitesError
from acutance.sites.lookup import LIBRARIES as LIBRARIES
from acutance.sites.lookup import all_sites as all_sites
from acutance.sites.lookup import blocks as blocks
from acutance.sites.lookup import checking_blocks as checking_blocks
from acutance.sites.lookup import final_norm as final_norm
from acutance.sites.lookup import find as find
from acutance.sites.lookup import layers_of as layers_of
from acutance.sites.lookup import mitigation_spec as mitigation_spec
from acutance.sites.lookup import modules_between as modules_between
from acutance.sites.lookup import part_of as part_of
from acutance.sites.lookup import reading as reading
from acutance.sites.lookup import record as record
from acutance.sites.lookup import special_tokens as special_tokens
from acutance.sites.lookup import token_kind as token_kind
from acutance.sites.patched import PatchedSite as PatchedSite
from acutance.sites.patched import Stack as Stack
from acutance.sites.site import AttentionSite as AttentionSite
from acutance.sites.site import Library as Library
from acutance.sites.site import Undo as Undo
from acutance.sites.structure import Layer as Layer
from acutance.sites.structure import SpecialTokens as SpecialTokens
from acutance.sites.structure import cached_lookup as cached_lookup
from acutance.sites.structure import tokens_in as tokens_in
from acutance.sites.structure import tokens_out as tokens_out

_FILES = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
LIBRARIES += sorted((file.LIBRARY for file in _FILES if hasattr(file, "LIBRARY")), key=lambda one: one.generality)
