# Stops Ray on the workers of local.yaml. Its head runs this when Ray has ended there in order, by `ray down` or `ray stop`:
# workers would wait for another head, as long as switches.env says, and `ray down` itself asks only clouds to end theirs.
list='
import pathlib, yaml
config = yaml.safe_load((pathlib.Path.home() / "ray_bootstrap_config.yaml").read_text())
print(*config["provider"]["worker_ips"])'
for address in $(python -c "$list"); do
  ssh -i ~/ray_bootstrap_key.pem -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
    -o LogLevel=ERROR -o ConnectTimeout=10 "$(id -un)@$address" "bash --login -c 'ray stop'" &
done
wait
