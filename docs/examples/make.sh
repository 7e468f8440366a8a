#!/usr/bin/env bash
# Makes the example reports beside this file: one red and one green run on the demo.
#   bash docs/examples/make.sh            (from the repository's root; minutes, the model runs once)
#   bash docs/examples/make.sh --pictures (also the screenshots; needs chromium)
#   bash docs/examples/make.sh --screenshots (only those, of the report that lies here)
set -euo pipefail
here=docs/examples demo=kernjax/demo/recordings work=${WORK:-out/examples}
[ -d "$demo" ] || { echo "run this from the repository's root" >&2; exit 3; }

mkdir -p "$work"
if [ "${1:-}" != --screenshots ]; then
    python -m kernjax.record --policy=fp8 --reference=$demo/demo.f32.zip --out="$work/fp8"
    for colour in red green; do
        candidate=$demo/demo.chunk32.zip
        [ $colour = red ] && candidate=$work/fp8
        # Exit code 1 is what the red one is for.
        python -m kernjax.check --candidate="$candidate" --reference=$demo/demo.f32.zip \
            --band=$demo/demo.band.json --output_dir="$work/$colour" >/dev/null || [ $? -eq 1 ]
        mkdir -p $here/$colour
        cp "$work/$colour"/{report.html,report.md,junit.xml} $here/$colour/
    done
fi

[ -n "${1:-}" ] || exit 0
shot() { # NAME PAGE WIDTH HEIGHT [dark]
    local scheme=1
    [ "${5:-}" = dark ] && scheme=0
    chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars \
        --user-data-dir="$(pwd)/$work/profile" --blink-settings=preferredColorScheme=$scheme \
        --window-size="$3,$4" --screenshot="$(pwd)/$here/$1.png" "file://$2" 2>/dev/null
}
# Chromium's window is no narrower than 500 pixels: the phone is a frame in it.
page=$(pwd)/$here/red/report.html
phone=$(pwd)/$work/phone.html
echo "<body style='margin:0 55px;background:#999'><iframe src='file://$page'" \
    "style='border:0;width:390px;height:1500px'></iframe>" >"$phone"
shot phone "$phone" 500 1500
shot laptop "$page" 1280 1500
shot laptop_dark "$page" 1280 1500 dark
shot wide "$page" 1920 1500
