"""A Ray must ask for tokens: one that does not lets all who reach its ports run code in it, so it is refused."""

from tandem.configs.errors import SettingsError

GCS_CALL, GCS_CALL_S = "/ray.rpc.NodeInfoGcsService/GetClusterId", 10.0
"""A cheap call of Ray's GCS that takes no arguments."""


def check_token(address: str, gcs_address: str, flag: str, override: str) -> None:
    """Raises SettingsError when the Ray asks nobody for a token, or its answer does not tell. address: as the user has
    it. flag: what names this Ray. override: what accepts it all the same."""
    if not asks_for_token(gcs_address, flag, override):
        raise SettingsError(
            f"{address}: this Ray asks nobody for a token, so all who reach its ports can run code in it; start it "
            f"with RAY_AUTH_MODE=token, or accept that with {override}",
            flag,
        )


def asks_for_token(gcs_address: str, flag: str, override: str) -> bool:
    """True if the Ray there refuses a call without a token. True also for one that speaks TLS only, which asks for
    certificates. Raises SettingsError when its answer does not tell."""
    import grpc

    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)

    with grpc.insecure_channel(gcs_address) as channel:
        ask = channel.unary_unary(GCS_CALL, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=GCS_CALL_S)
        except grpc.RpcError as error:
            if (code := error.code()) in refusals:
                return True
            raise SettingsError(
                f"{gcs_address}: cannot tell whether this Ray asks for a token (it answered {code.name}); join it all "
                f"the same with {override}",
                flag,
            ) from None
    return False
