"""The HTTP session behind every source. Imports requests: only to be imported where something is asked."""

from __future__ import annotations

import warnings
from typing import Any

import requests
from urllib3.exceptions import InsecureRequestWarning

from doctor.access import Access


class Session(requests.Session):
    """A POST carries its parameters as a form, since a query for many signals is too long for a URL; a server
    that takes no POST is asked by GET."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        self.verify = str(access.ca_file) if access.ca_file is not None else access.verify
        if access.token is not None:
            self.auth = _Bearer(access.token)
        elif access.user is not None:
            self.auth = requests.auth.HTTPBasicAuth(access.user.encode(), (access.password or "").encode())

    def request(self, method: Any, url: Any, *args: Any, **given: Any) -> requests.Response:
        given.setdefault("verify", self.verify)  # or $REQUESTS_CA_BUNDLE would take its place
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InsecureRequestWarning)  # asked for by --insecure
            if method != "POST":
                return super().request(method, url, *args, **given)
            params = given.pop("params", None)
            answer = super().request("POST", url, *args, **{**given, "data": params})
            if answer.status_code == requests.codes.method_not_allowed:
                return super().request("GET", url, *args, **{**given, "params": params})
            return answer


class _Bearer(requests.auth.AuthBase):
    """As an ``auth``: a mere header would give way to ~/.netrc."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request
